"""Writers continue prompts: a model in memory, or one behind an HTTP API.

writer            the `Writer` protocol, `Prompt`, `Completion`; removes reasoning from an answer
local             a generator in this process
endpoint          a model behind a chat-completions endpoint (OpenAI, vLLM, llama.cpp, Ollama)
chat_settings     bounds, prices
chat_events       server-sent events and replies; the key is masked in replies
"""
