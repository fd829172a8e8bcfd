"""Suffixes of picture and video files, to find them in folders and to tell a file's name from words."""

from typing import Final

PICTURES: Final = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif",
    ".heic", ".heif", ".heics", ".heifs", ".hif", ".mpo",
))  # fmt: skip
VIDEOS: Final = frozenset((".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".ogv"))
