"""Intake: hostile URLs, hostile servers, hostile files."""
