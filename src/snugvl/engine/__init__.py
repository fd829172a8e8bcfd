"""The engine: requests in, tokens out. Knows no asyncio, no HTTP and no text."""
