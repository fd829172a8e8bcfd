"""OpenAI's protocol with OpenAI's own SDK, and raw requests for what the SDK wouldn't send."""
