"""Drive a model on pages step by step: requests are named by handle, pages come and go beneath them."""

from paged import Runtime, load_model

loaded = load_model("smollm2")
runtime = Runtime(loaded.model, num_pages=17, tokens_per_page=16, max_requests=2)

first = runtime.add(loaded.tokenizer.encode("Once upon a time"))
second = runtime.add(loaded.tokenizer.encode("def fibonacci(n):"))
runtime.prefill([first, second])
for _ in range(12):
    runtime.decode([first, second])
print(loaded.tokenizer.decode(runtime.tokens(first)))
print("pages:", runtime.plane.pages_of(first).tolist(), runtime.plane.pages_of(second).tolist())

freed = runtime.release(first)  # its pages are scrubbed before anybody else gets them
print("freed:", freed.tolist(), "available:", runtime.plane.available_pages)
for token in runtime.decode([second]):
    print(f"next of the second: {loaded.tokenizer.decode([token.id])!r}, log probability {token.logprob:.3f}")
