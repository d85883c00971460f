"""Generate offline with one adapter: the same question to the base model and to the adapter `sql`."""

from outrider import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "How many customers are from Lisbon?"}]


def main() -> None:
    """Print both answers."""
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM() as llm:  # the embedded demo model, which has the adapters json, sql, support and tools
        (base,) = llm.chat(QUESTION, params, use_tqdm=False)
        (adapted,) = llm.chat(QUESTION, params, lora_request="sql", use_tqdm=False)
    print("base:", base.outputs[0].text)
    print("sql: ", adapted.outputs[0].text)


if __name__ == "__main__":
    main()
