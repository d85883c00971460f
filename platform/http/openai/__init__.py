"""Routes that generate or tokenize, as the OpenAI API has them."""
