"""Any model that Hugging Face transformers knows, behind the backend protocol."""
