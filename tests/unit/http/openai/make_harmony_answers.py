"""Write harmony_answers.json: how OpenAI's library reads the answers of test_harmony.py.

    pip install openai-harmony
    python tests/unit/http/openai/make_harmony_answers.py

The library fetches its vocabulary `o200k_base.tiktoken`, or takes it from the folder `TIKTOKEN_ENCODINGS_BASE`. Tests
need neither.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("harmony_answers.json")


def messages(harmony: Any, encoding: Any, text: str) -> list[dict[str, str | None]]:
    """Channel, recipient and text of an answer's messages; the last one may be cut."""
    parser = harmony.StreamableParser(encoding, role=harmony.Role.ASSISTANT)
    for token in encoding.encode(text, allowed_special="all"):
        parser.process(token)
    found = [(m.channel, m.recipient, "".join(part.text for part in m.content)) for m in parser.messages]
    if parser.current_content:
        found.append((parser.current_channel, parser.current_recipient, parser.current_content))
    return [dict(zip(("channel", "recipient", "text"), entry, strict=True)) for entry in found]


def main() -> None:
    """Read each answer token by token."""
    import openai_harmony as harmony

    from outrider.tests.unit.http.openai.test_harmony import ANSWERS

    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    made = {name: {"text": text, "messages": messages(harmony, encoding, text)} for name, text in ANSWERS.items()}
    about = f"openai-harmony {version('openai-harmony')}, HARMONY_GPT_OSS; written by make_harmony_answers.py"
    FILE.write_text(json.dumps({"made_with": about, "answers": made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
