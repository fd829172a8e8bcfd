"""Pictures and videos of strangers: fetched, checked and decoded where they can do no harm."""
