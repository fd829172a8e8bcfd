"""Diagnosis of a log of vLLM, PyTorch, llama.cpp or Ollama: why it failed, the budget, the changed
command."""
