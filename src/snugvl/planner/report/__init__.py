"""A plan for people and programs: lines, a terminal's colours, JSON and a picture. It decides nothing."""
