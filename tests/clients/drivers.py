"""Python clients, each used as its own documentation shows. A method that a class lacks is a feature that its client
lacks, or cannot show: `llm` and outlines cannot force a call of a tool, which the demo model would not make itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pydantic

PROMPT = "The capital of France"
QUESTION = "Anna from Lisbon ordered 3 green lamps for 42 euros."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Lisbon", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
MESSAGES = [{"role": "user", "content": QUESTION}]
LENGTH = {"temperature": 0, "max_tokens": 24}
FORM = {"temperature": 0, "max_tokens": 80}


class Order(pydantic.BaseModel):
    """Form of an answer."""

    customer: Annotated[str, pydantic.Field(max_length=20)]
    quantity: Annotated[int, pydantic.Field(ge=0, le=99)]


class Client:
    """One client of a server: `url` ends with /v1, `folder` may be written to."""

    title: str

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    def openai(self) -> Any:
        import openai

        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)


class OpenAI(Client):
    title = "openai (Python)"

    def chat(self, model: str) -> str:
        return (
            self.openai().chat.completions.create(model=model, messages=MESSAGES, **LENGTH).choices[0].message.content
        )

    def stream(self, model: str) -> list[str]:
        chunks = self.openai().chat.completions.create(model=model, messages=MESSAGES, stream=True, **LENGTH)
        return [chunk.choices[0].delta.content or "" for chunk in chunks]

    def tools(self, model: str) -> tuple[str, dict]:
        answer = self.openai().chat.completions.create(
            model=model, messages=MESSAGES, tools=[TOOL], tool_choice="required", **FORM
        )
        function = answer.choices[0].message.tool_calls[0].function
        return function.name, json.loads(function.arguments)

    def schema(self, model: str) -> Order:
        answer = self.openai().chat.completions.parse(model=model, messages=MESSAGES, response_format=Order, **FORM)
        return answer.choices[0].message.parsed

    def completion(self, model: str) -> str:
        return self.openai().completions.create(model=model, prompt=PROMPT, **LENGTH).choices[0].text

    def logprobs(self, model: str) -> tuple[float, str | list[int], int]:
        answer = self.openai().completions.create(model=model, prompt=QUESTION, echo=True, logprobs=1, max_tokens=1)
        return sum(answer.choices[0].logprobs.token_logprobs[1:-1]), QUESTION, 1

    def embeddings(self, model: str) -> list[float]:
        return self.openai().embeddings.create(model=model, input=[QUESTION]).data[0].embedding

    def models(self) -> list[str]:
        return [model.id for model in self.openai().models.list()]


class Anthropic(Client):
    title = "anthropic (Python)"

    def _client(self) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=60)

    def _answer(self, model: str, **options: Any) -> Any:
        return self._client().messages.create(model=model, messages=MESSAGES, **options)

    def chat(self, model: str) -> str:
        return self._answer(model, extra_body={"temperature": 0}, max_tokens=LENGTH["max_tokens"]).content[0].text

    def stream(self, model: str) -> list[str]:
        options = {"extra_body": {"temperature": 0}, "max_tokens": LENGTH["max_tokens"]}
        with self._client().messages.stream(model=model, messages=MESSAGES, **options) as stream:
            return list(stream.text_stream)

    def tools(self, model: str) -> tuple[str, dict]:
        tool = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": PARAMETERS}
        options = {"extra_body": {"temperature": 0}, "max_tokens": FORM["max_tokens"]}
        block = self._answer(model, tools=[tool], tool_choice={"type": "any"}, **options).content[0]
        return block.name, block.input

    def models(self) -> list[str]:
        """All pages, of one model each."""
        found = list(self._client().models.list(limit=1))
        assert {model.type for model in found} == {"model"}
        assert self._client().models.retrieve(found[-1].id) == found[-1]
        return [model.id for model in found]


class Cohere(Client):
    title = "cohere"

    def rerank(self, model: str, documents: list[str], max_tokens: int | None) -> list[tuple[int, float]]:
        import cohere

        client = cohere.ClientV2(api_key="none", base_url=self.url.removesuffix("/v1"), timeout=60)
        options = {} if max_tokens is None else {"max_tokens_per_doc": max_tokens}
        results = client.rerank(model=model, query=QUESTION, documents=documents, **options).results
        return [(result.index, result.relevance_score) for result in results]


class Guidance(Client):
    title = "guidance (VLLMModel)"

    def schema(self, model: str) -> Order:
        import guidance
        from guidance.models.experimental import VLLMModel

        # The form admits further members, whose text a client that samples may go on with until it is cut off.
        state = VLLMModel(model, sampling_params={"top_k": 1}, base_url=self.url, api_key="none", echo=False)
        with guidance.user():
            state += QUESTION
        with guidance.assistant():
            state += guidance.json(name="order", schema=Order, temperature=0, max_tokens=FORM["max_tokens"])
        return Order.model_validate_json(state["order"])


class LangChain(Client):
    title = "LangChain (langchain-openai)"

    def _model(self, model: str, **options: Any) -> Any:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(base_url=self.url, api_key="none", model=model, **options)

    def chat(self, model: str) -> str:
        return self._model(model, **LENGTH).invoke(QUESTION).content

    def stream(self, model: str) -> list[str]:
        return [chunk.content for chunk in self._model(model, **LENGTH).stream(QUESTION)]

    def tools(self, model: str) -> tuple[str, dict]:
        call = self._model(model, **FORM).bind_tools([TOOL], tool_choice="required").invoke(QUESTION).tool_calls[0]
        return call["name"], call["args"]

    def schema(self, model: str) -> Order:
        return self._model(model, **FORM).with_structured_output(Order).invoke(QUESTION)

    def completion(self, model: str) -> str:
        from langchain_openai import OpenAI

        return OpenAI(base_url=self.url, api_key="none", model=model, **LENGTH).invoke(PROMPT)

    def embeddings(self, model: str) -> list[float]:
        from langchain_openai import OpenAIEmbeddings

        # Without it LangChain sends token ids of OpenAI's own vocabulary.
        options = {"check_embedding_ctx_length": False}
        return OpenAIEmbeddings(base_url=self.url, api_key="none", model=model, **options).embed_query(QUESTION)


class LiteLLM(Client):
    title = "LiteLLM"

    def _options(self, model: str) -> dict[str, Any]:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
        return {"model": f"openai/{model}", "api_base": self.url, "api_key": "none"}

    def _answer(self, model: str, **options: Any) -> Any:
        options = self._options(model) | options
        import litellm

        return litellm.completion(messages=MESSAGES, **options)

    def chat(self, model: str) -> str:
        return self._answer(model, **LENGTH).choices[0].message.content

    def stream(self, model: str) -> list[str]:
        return [chunk.choices[0].delta.content or "" for chunk in self._answer(model, stream=True, **LENGTH)]

    def tools(self, model: str) -> tuple[str, dict]:
        answer = self._answer(model, tools=[TOOL], tool_choice="required", **FORM)
        function = answer.choices[0].message.tool_calls[0].function
        return function.name, json.loads(function.arguments)

    def schema(self, model: str) -> Order:
        return Order.model_validate_json(self._answer(model, response_format=Order, **FORM).choices[0].message.content)

    def completion(self, model: str) -> str:
        options = self._options(model)
        import litellm

        options["model"] = f"text-completion-openai/{model}"
        return litellm.text_completion(prompt=PROMPT, **options, **LENGTH).choices[0].text

    def embeddings(self, model: str) -> list[float]:
        options = self._options(model)
        import litellm

        return litellm.embedding(input=[QUESTION], encoding_format="float", **options).data[0]["embedding"]


class Instructor(Client):
    title = "instructor"

    def _answer(self, mode: str, model: str, **options: Any) -> Order:
        import instructor

        client = instructor.from_openai(self.openai(), mode=instructor.Mode[mode])
        return client.chat.completions.create(
            model=model, messages=MESSAGES, response_model=Order, max_retries=0, **FORM, **options
        )

    def tools(self, model: str) -> tuple[str, dict]:
        return "Order", self._answer("TOOLS", model).model_dump()

    def schema(self, model: str) -> Order:
        return self._answer("JSON_SCHEMA", model)


class InstructorResponses(Client):
    title = "instructor (RESPONSES_TOOLS)"

    def tools(self, model: str) -> tuple[str, dict]:
        import instructor

        client = instructor.from_openai(self.openai(), mode=instructor.Mode.RESPONSES_TOOLS)
        options = {"temperature": 0, "max_output_tokens": FORM["max_tokens"], "max_retries": 0}
        return "Order", client.responses.create(
            model=model, input=QUESTION, response_model=Order, **options
        ).model_dump()


class PydanticAI(Client):
    title = "pydantic-ai"

    def _model(self, model: str) -> Any:
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        return OpenAIChatModel(model, provider=OpenAIProvider(base_url=self.url, api_key="none"))

    def _agent(self, model: str, **options: Any) -> Any:
        from pydantic_ai import Agent

        return Agent(self._model(model), retries=0, **options)

    def _settings(self, fields: dict[str, Any]) -> Any:
        """Fields as the body has them: to this client a name that begins with "o" is a reasoning model of OpenAI's,
        whose temperature it leaves out."""
        return {"max_tokens": fields["max_tokens"], "extra_body": {"temperature": 0}}

    def chat(self, model: str) -> str:
        return self._agent(model).run_sync(QUESTION, model_settings=self._settings(LENGTH)).output

    def stream(self, model: str) -> list[str]:
        answer = self._agent(model).run_stream_sync(QUESTION, model_settings=self._settings(LENGTH))
        return list(answer.stream_text(delta=True, debounce_by=None))

    def tools(self, model: str) -> tuple[str, dict]:
        return "Order", self._agent(model, output_type=Order).run_sync(
            QUESTION, model_settings=self._settings(FORM)
        ).output.model_dump()

    def schema(self, model: str) -> Order:
        from pydantic_ai import NativeOutput

        return (
            self._agent(model, output_type=NativeOutput(Order))
            .run_sync(QUESTION, model_settings=self._settings(FORM))
            .output
        )

    def embeddings(self, model: str) -> list[float]:
        from pydantic_ai.embeddings import Embedder
        from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=self.url, api_key="none")
        return list(Embedder(OpenAIEmbeddingModel(model, provider=provider)).embed_query_sync(QUESTION).embeddings[0])


class Outlines(Client):
    title = "outlines (OpenAI and vLLM)"

    def chat(self, model: str) -> str:
        import outlines

        return outlines.from_openai(self.openai(), model)(QUESTION, **LENGTH)

    def stream(self, model: str) -> list[str]:
        import outlines

        return list(outlines.from_vllm(self.openai(), model).stream(QUESTION, **LENGTH))

    def schema(self, model: str) -> Order:
        import outlines

        ours, theirs = outlines.from_openai(self.openai(), model), outlines.from_vllm(self.openai(), model)
        assert Order.model_validate_json(ours(QUESTION, Order, **FORM))
        assert theirs(QUESTION, outlines.types.regex("[a-z]{3}-[0-9]"), **FORM)[3] == "-"
        return Order.model_validate_json(theirs(QUESTION, Order, **FORM))


class Llm(Client):
    title = "llm (command line)"

    def _run(self, model: str, *options: str) -> str:
        lines = [
            {"model_id": f"demo-{name}", "model_name": name, "api_base": self.url, "supports_schema": True}
            for name in ("outrider-demo", "sql")
        ]
        (self.folder / "extra-openai-models.yaml").write_text(json.dumps(lines))  # JSON is YAML
        environment = os.environ | {"LLM_USER_PATH": str(self.folder), "OPENAI_API_KEY": "none"}
        command = [str(Path(sys.executable).parent / "llm"), "-m", f"demo-{model}", "-o", "temperature", "0", *options]
        done = subprocess.run(
            [*command, QUESTION], env=environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.removesuffix("\n")

    def chat(self, model: str) -> str:
        return self._run(model, "-o", "max_tokens", "24", "--no-stream")

    def stream(self, model: str) -> list[str]:
        return [self._run(model, "-o", "max_tokens", "24"), ""]  # its output says nothing of the pieces

    def schema(self, model: str) -> Order:
        schema = json.dumps(Order.model_json_schema())
        return Order.model_validate_json(self._run(model, "-o", "max_tokens", "80", "--schema", schema))
