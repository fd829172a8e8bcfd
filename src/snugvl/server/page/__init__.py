"""The page at /: one HTML file, its style sheet and a few modules of plain JavaScript. No build step."""
