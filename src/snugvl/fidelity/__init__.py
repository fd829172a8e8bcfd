"""What a format, an image size or another model costs on a user's own pictures (`snugvl compare`)."""
