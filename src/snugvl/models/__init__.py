"""Networks. They know tensors and the paged cache, nothing of requests, tokenizers or HTTP."""
