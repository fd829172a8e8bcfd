"""Media: hostile URLs, hostile servers, hostile files."""
