"""What a checkpoint is: its configuration and its safetensors headers. No torch in here."""
