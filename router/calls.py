"""From a checked body to a call: the model resolved once, the prompts encoded, the limits applied."""

from collections.abc import Sequence
from dataclasses import dataclass

from registry.catalog import Resolution
from registry.types import BaseSpec
from replica.messages import GenerateRequest, SamplingParams
from router.config import RequestLimits
from router.errors import BadRequest, ContextLengthExceeded
from router.sampling import check_limits, check_token_id, sampling_params
from router.schemas import ChatBody, CompletionBody, GenerationBody
from router.tokenizer import BaseTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a call. `echo` is the text to repeat before each answer; choices count from `first_index`."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    first_index: int = 0
    echo: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Everything a call needs until its last token. `model` is what the client wrote."""

    call_id: str
    created_s: int
    tenant: str
    model: str
    resolution: Resolution
    fingerprint: str
    tokenizer: BaseTokenizer
    prompts: tuple[Prompt, ...]
    stops: tuple[str, ...] = ()
    include_usage: bool = False
    with_logprobs: bool = False
    is_whole: bool = False
    """Whether the client gets the answer in one piece, so that it may begin anew on another replica."""
    weight: float = 1.0
    """The tenant's share against others."""
    max_slots: int | None = None
    """At how many of its adapters a replica may work for the tenant at a time."""
    expected_tokens: int | None = None
    """What a choice of this tenant usually takes, when the client set no limit."""

    @property
    def num_charged_tokens(self) -> int:
        """What the tenant's limit is charged at first: the prompts, and what every choice may take."""
        return self.num_prompt_tokens + sum(
            prompt.sampling.n * self.expected_output(prompt.sampling.max_tokens) for prompt in self.prompts
        )

    def expected_output(self, max_tokens: int) -> int:
        return max_tokens if self.expected_tokens is None else min(max_tokens, self.expected_tokens)

    @property
    def num_choices(self) -> int:
        return sum(prompt.sampling.n for prompt in self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def request(self, number: int) -> GenerateRequest:
        """The message to a replica for prompt `number`."""
        prompt = self.prompts[number]
        request_id = self.call_id if len(self.prompts) == 1 else f"{self.call_id}-{number}"
        return GenerateRequest(
            request_id,
            self.tenant,
            self.resolution.digest,
            prompt.token_ids,
            prompt.sampling,
            self.weight,
            None if self.expected_tokens is None else self.expected_output(prompt.sampling.max_tokens),
            max_slots=self.max_slots,
        )


@dataclass(frozen=True, slots=True)
class Binding:
    """A resolved model with what it is served by."""

    resolution: Resolution
    base: BaseSpec
    tokenizer: BaseTokenizer

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes exactly when other weights answer."""
        return f"fp_{(self.resolution.digest or self.base.digest)[:16]}"


@dataclass(frozen=True, slots=True)
class CallBuilder:
    """Builds calls under the gateway's limits."""

    limits: RequestLimits

    async def chat(self, call_id: str, created_s: int, tenant: str, body: ChatBody, binding: Binding) -> Call:
        """Raises BadRequest (template, limits) and ContextLengthExceeded."""
        check_limits(body, self.limits)
        token_ids = await binding.tokenizer.encode_chat([message.for_template() for message in body.messages])
        prompt = Prompt(token_ids, self._sampling(body, token_ids, binding, "messages"))
        return self._call(call_id, created_s, tenant, body, binding, (prompt,), bool(body.logprobs))

    async def completion(
        self, call_id: str, created_s: int, tenant: str, body: CompletionBody, binding: Binding
    ) -> Call:
        """Raises BadRequest (prompt, limits) and ContextLengthExceeded."""
        check_limits(body, self.limits)
        prompts: list[Prompt] = []
        for text_or_ids in body.prompt:
            token_ids = await self._encode(text_or_ids, binding)
            sampling = self._sampling(body, token_ids, binding, "prompt")
            prompts.append(
                Prompt(token_ids, sampling, len(prompts) * sampling.n, self._echo(body, text_or_ids, binding))
            )
        return self._call(call_id, created_s, tenant, body, binding, prompts, body.logprobs is not None)

    async def _encode(self, text_or_ids: str | tuple[int, ...], binding: Binding) -> tuple[int, ...]:
        if isinstance(text_or_ids, str):
            return await binding.tokenizer.encode_text(text_or_ids)
        check_token_ids(text_or_ids, binding.base)
        return text_or_ids

    def _sampling(self, body: GenerationBody, token_ids: Sequence[int], binding: Binding, param: str) -> SamplingParams:
        if not token_ids:
            raise BadRequest(f"{param} encodes to no tokens; a prompt needs at least one", param)
        return sampling_params(body, len(token_ids), binding.base, self.limits)

    def _echo(self, body: CompletionBody, text_or_ids: str | tuple[int, ...], binding: Binding) -> str | None:
        if not body.echo:
            return None
        return text_or_ids if isinstance(text_or_ids, str) else binding.tokenizer.decode(text_or_ids)

    def _call(
        self,
        call_id: str,
        created_s: int,
        tenant: str,
        body: GenerationBody,
        binding: Binding,
        prompts: Sequence[Prompt],
        with_logprobs: bool,
    ) -> Call:
        return Call(
            call_id=call_id,
            created_s=created_s,
            tenant=tenant,
            model=body.model,
            resolution=binding.resolution,
            fingerprint=binding.fingerprint,
            tokenizer=binding.tokenizer,
            prompts=tuple(prompts),
            stops=tuple(body.stop or ()),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            with_logprobs=with_logprobs,
            is_whole=not body.stream,
        )


def check_token_ids(token_ids: Sequence[int], base: BaseSpec) -> None:
    """Raises ContextLengthExceeded, and BadRequest for the first id outside the vocabulary: the length first, then two
    passes without a call a token, since nothing else runs meanwhile."""
    if len(token_ids) > base.context_length:
        raise ContextLengthExceeded(
            f"this model's context is {base.context_length} tokens; the prompt has {len(token_ids)}; shorten it",
            "prompt",
        )
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < base.vocab_size:
        for token_id in token_ids:
            check_token_id(token_id, base.vocab_size, "prompt")
