"""Let a model complete prompts, either in memory or behind an HTTP API.

writer            the `Writer` protocol, `Prompt` and `Completion`; removal of reasoning
local             a generator in this process
endpoint          a model behind a chat-completions endpoint (OpenAI, vLLM, llama.cpp, Ollama)
chat_settings     settings, limits and prices of an endpoint
chat_events       parsing of server-sent events and replies, in which the API key is masked
"""
