"""From what people send to what the engine wants: pictures, videos, text and chat templates."""
