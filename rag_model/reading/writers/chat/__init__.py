"""The chat-completions protocol that OpenAI's API, vLLM, llama.cpp, Ollama and `transformers serve` speak.

place.Place               the base URL and the key of an endpoint, from the environment
settings.ChatSettings     bounds, prices, tokens
request.Chat              one request: streamed, within its time and its bytes
mask.Mask                 the key, taken out of what the endpoint writes
tries.with_tries          what is worth trying again, and when
problems                  one sentence for each way to fail
"""
