"""MediaLoader: hostile URLs, hostile servers, hostile files."""
