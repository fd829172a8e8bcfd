"""llama.cpp's server as a supervised child, or one that runs already, behind the service protocol."""
