"""How to run a script that nobody changed, and to see what it does: its ranks (launching,
libraries), its steps and collectives, and what a rank reads and computes (rank). Then verify.py
finds what differs (differences), and says it (wording).
"""
