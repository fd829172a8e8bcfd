"""All tests."""

import gc

# Looking for garbage among the million objects of torch and transformers took a seventh of all tests' time.
# Set before they are imported: it was a sixth of that, too.
gc.set_threshold(100_000, 50, 1000)
