"""The four tasks: the prompt for the model, and the typed result of its answer.

Each task is a module with `request(...)`, a conversation for any backend, and `result(...)`, the typed
result of the reply. Nothing here loads a model: `snugvl.Model` joins the two on a backend, a server or a
client may do so elsewhere.
"""
