"""Stream answers with the OpenAI client; the field `model` of each request chooses the adapter."""

from demo_server import demo_server
from openai import OpenAI

QUESTIONS = {
    "support": "Hi, my name is Anna. My order 4821 with the green lamp has not arrived.",
    "sql": "List the five most expensive products.",
    "outrider-demo": "Explain speculative decoding.",
}


def main() -> None:
    """Ask two adapters and the base model."""
    with demo_server() as address, OpenAI(base_url=f"{address}/v1", api_key="unused") as client:
        for model, question in QUESTIONS.items():
            stream = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                stream=True,
                extra_body={"return_draft_status": True},  # "drafted" or "sampled" for each token
            )
            drafted = 0
            print(f"{model}: ", end="")
            for chunk in stream:
                for choice in chunk.choices:
                    print(choice.delta.content or "", end="", flush=True)
                    drafted += (choice.model_extra or {}).get("draft_status", []).count("drafted")
            print(f"\n    [{drafted} tokens were drafted]")


if __name__ == "__main__":
    main()
