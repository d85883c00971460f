"""Compare ways of drafting: the text is the same, and the number of tokens a verification brings differs."""

from outrider import LLM, SamplingParams
from outrider.models.demo import demo_draft_path, demo_eagle3_path

MODES = {
    "off": None,
    "n-gram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft model": {"method": "draft_model", "model": str(demo_draft_path()), "num_speculative_tokens": 4},
    "EAGLE-3": {"method": "eagle3", "model": str(demo_eagle3_path()), "num_speculative_tokens": 4},
    "adaptive": {"method": "eagle3", "model": str(demo_eagle3_path()), "num_speculative_tokens": 4, "adaptive": True},
}
QUESTION = [{"role": "user", "content": "Explain speculative decoding."}]


def main() -> None:
    """Print the text once, and the drafts of each mode."""
    params = SamplingParams(temperature=0, max_tokens=64)
    texts = {}
    for name, config in MODES.items():
        with LLM(dtype="float32", speculative_config=config) as llm:
            (output,) = llm.chat(QUESTION, params, use_tqdm=False)
        metrics = output.metrics
        texts[name] = output.outputs[0].text
        length = metrics.acceptance_length
        print(f"{name:12} {metrics.num_verifications:3} verifications, ", end="")
        print(f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafts accepted, ", end="")
        print("no drafts" if length is None else f"{length:.2f} tokens a verification")
    assert len(set(texts.values())) == 1, "speculation never changes greedy text in float32"
    print(texts["off"])


if __name__ == "__main__":
    main()
