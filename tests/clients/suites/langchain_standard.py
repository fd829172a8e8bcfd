"""langchain-tests' standard cases for chat models: `tests/clients/suites/run.py` runs them.

SNUGVL_SUITE_URL is the server's base URL.
"""

import os

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ["SNUGVL_SUITE_URL"]


class TestOpenAI(ChatModelIntegrationTests):
    """Over chat completions."""

    supports_image_inputs = True
    supports_image_urls = False  # the cases' addresses are of the web
    supports_image_tool_message = True

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        params = {
            "model": "m",
            "base_url": f"{URL}/v1",
            "api_key": "none",
            "max_retries": 0,
            "max_tokens": 64,
        }
        return params | {"stream_usage": True}  # which it asks of OpenAI's own servers alone by default


class TestAnthropic(ChatModelIntegrationTests):
    """Over messages."""

    supports_image_inputs = True

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict:
        return {"model": "m", "base_url": URL, "api_key": "none", "max_retries": 0, "max_tokens": 64}


class TestOllama(ChatModelIntegrationTests):
    """Over Ollama's chat."""

    supports_image_inputs = True
    has_tool_choice = False

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict:
        return {"model": "m", "base_url": URL, "num_predict": 64}
