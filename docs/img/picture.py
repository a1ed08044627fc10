"""What all pictures are drawn with: the page, colours, boxes, lines and text, as SVG."""

# The colours of Okabe and Ito
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
SKY, YELLOW, PINK = "#56B4E9", "#F0E442", "#CC79A7"
WIDTH, LEFT, RIGHT = 800, 112, 790  # of a picture, and where its lanes begin and end


class Picture:
    def __init__(self):
        self.lines = []

    def text(self, x, y, text, anchor="start", size=12, weight="normal"):
        self.lines.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="black" font-weight="{weight}">{text}</text>'
        )

    def box(self, x, y, width, height, fill, text="", edge="black", opacity=1):
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}" fill-opacity="{opacity}" stroke="{edge}" stroke-dasharray="none"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, "middle", 11)

    def line(self, *points, dash="", fill="none"):
        path = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = dash and f' stroke-dasharray="{dash}"'
        self.lines.append(f'<path d="M{path}" fill="{fill}" stroke="black"{dash}/>')

    def legend(self, y, entries):
        """Coloured boxes and what they mean, in lines. Returns where this ends."""
        x = LEFT
        for name, fill, *opacity in entries:
            wide = 28 + 6.4 * len(name)
            if x + wide > RIGHT:
                x, y = LEFT, y + 20
            self.box(x, y, 14, 14, fill, opacity=opacity[0] if opacity else 1)
            self.text(x + 19, y + 11, name, size=11)
            x += wide
        return y + 24

    def save(self, path, height):
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif">\n'
            '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
            '<path d="M0,6 L6,0" stroke="#555"/></pattern>\n'
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n'
            + "\n".join(self.lines)
            + "\n</svg>\n",
            encoding="utf-8",
        )
