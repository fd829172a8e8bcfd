"""Measuring a server of the OpenAI API: how fast it answers, at which load, in how much memory.

    workload ─► load ───────────────────────────► result ─────► report
    (bodies)   (bytes, times; read afterwards)   (arithmetic)

While requests run, only bytes and times are kept: reading them comes after, so that the generator of the load
costs little and all clients see the same clock. `measure` brings them together. No torch.
"""
