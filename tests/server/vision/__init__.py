"""The four tasks over HTTP."""
