"""The four tasks: what to say to the model, and what its answer means.

Each task is a module with `request(...)`, a conversation for any backend, and `result(...)`, the typed
result of the reply. Nothing here loads a model: `snugvl.Model` joins the two on a backend, a server or a
client may do so elsewhere.
"""
