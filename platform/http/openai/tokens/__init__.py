"""Token ids in, token ids out: vLLM's routes for clients that tokenize themselves, such as trainers and gateways.

    conversation --render--> generate request --generate--> generate response --derender--> chat completion

`generate` runs the model and needs no tokenizer; `render` and `derender` need the tokenizer and run no model.
"""
