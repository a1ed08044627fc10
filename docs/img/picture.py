"""What all pictures are drawn with: the page, colours, boxes, lines, arrows and text, as SVG."""

# The colours of Okabe and Ito
BLUE, ORANGE, GREEN, SKY, YELLOW, PINK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#56B4E9",
    "#F0E442",
    "#CC79A7",
)
WIDTH, LEFT, RIGHT = 800, 112, 790  # of a picture, and where its lanes begin and end


class Picture:
    def __init__(self):
        self.lines = []

    def text(self, x, y, text, anchor="start", size=12, colour="black", weight="normal"):
        self.lines.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="{colour}" font-weight="{weight}">{text}</text>'
        )

    def box(
        self,
        x,
        y,
        width,
        height,
        fill="white",
        text="",
        edge="black",
        colour="black",
        dash="none",
        opacity=1,
    ):
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}" fill-opacity="{opacity}" stroke="{edge}" stroke-dasharray="{dash}"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, "middle", 11, colour)

    def line(self, *points, dash="", fill="none"):
        path = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = dash and f' stroke-dasharray="{dash}"'
        self.lines.append(f'<path d="M{path}" fill="{fill}" stroke="black"{dash}/>')

    def arrow(self, *points):
        """Lines from point to point, each level or upright, with a head at the last one."""
        (x0, y0), (x, y) = points[-2:]
        across, down = (x > x0) - (x < x0), (y > y0) - (y < y0)
        self.line(*points)
        self.lines.append(
            f'<path d="M{x:.1f},{y:.1f} l{-7 * across - 4 * down},'
            f'{-7 * down - 4 * across} l{8 * down},{8 * across} z"/>'
        )

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
            "\n".join(
                [
                    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                    f'width="{WIDTH}" height="{height}" '
                    'font-family="Helvetica, Arial, sans-serif">',
                    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
                    '<path d="M0,6 L6,0" stroke="#555"/></pattern>',
                    f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
                    *self.lines,
                    "</svg>\n",
                ]
            ),
            encoding="utf-8",
        )
