"""A log of vLLM, PyTorch, llama.cpp or Ollama → why it failed, the run's budget, the changed command."""
