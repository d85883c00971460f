"""Put requests of several adapters into one batch, with the base model and a weighted sum of two adapters."""

from outrider import LLM, SamplingParams

SENTENCE = "Anna from Lisbon ordered 3 green lamps for 42 euros."
LETTER = "Hi, my name is Anna. My order 4821 with the green lamp has not arrived."


def main() -> None:
    """Print four answers of one batch."""
    questions = [SENTENCE, SENTENCE, LETTER, SENTENCE]
    adapters = ["json", None, "support", [("json", 0.9), ("sql", 0.1)]]  # None is the base model
    chats = [[{"role": "user", "content": question}] for question in questions]
    with LLM() as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=96), lora_request=adapters, use_tqdm=False)
        for adapter, output in zip(adapters, outputs, strict=True):
            print(f"{adapter}: {output.outputs[0].text}")
        for info in llm.adapters.list():
            print(f"{info.name}: rank {info.rank}, digest {info.digest[:8]}")


if __name__ == "__main__":
    main()
