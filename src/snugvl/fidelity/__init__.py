"""`snugvl compare`: measures what a format, an image size or another model costs on a user's own pictures."""
