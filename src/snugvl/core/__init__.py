"""Types and small helpers that every room shares: messages, options, sizes, the memory ledger."""
