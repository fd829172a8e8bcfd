"""New values for context, image pixels and utilisation, from the numbers of the run.

KV(T, u) = KV measured + profile per token × (T measured − T) + (u − u measured) × total. The largest image
budget T and context are taken that leave a tenth of the KV cache as slack.
"""

from dataclasses import dataclass
from math import floor
from typing import Final

from snugvl.diagnose.facts import GIB, MIB, Facts, pixels
from snugvl.diagnose.models import stored_format

IMAGE_TOKENS: Final = (4096, 2048, 1536, 1024)
CONTEXTS: Final = (8192, 4096, 2048)
LONGER: Final = (131_072, 98_304, 65_536, 49_152, 40_960, 32_768, 24_576, 20_480, 16_384, 12_288)
SLACK: Final = 0.9
ENGINE_BYTES: Final = 300 * MIB  # what vLLM loads beside the checkpoint: position table, input buffers
CONTEXT_BYTES: Final = 450 * MIB  # CUDA context and libraries where the log does not say: an assumption


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits. `image_tokens`: None where no image budget has to change."""

    context: int | None
    image_tokens: int | None
    max_pixels: int | None
    utilisation: float | None
    kv_bytes: int | None
    inferred: bool = False


def safe_utilisation(facts: Facts) -> float | None:
    """The largest utilisation that what was free allows: a margin of 3 % of it, 8 % under WSL2."""
    if not facts.free or not facts.total or facts.total.nbytes <= 0:
        return None
    margin = 0.08 if facts.wsl2 else 0.03
    value = floor(facts.free.nbytes * (1 - margin) / facts.total.nbytes * 100) / 100
    return value if 0 < value <= 1 else None


def solve(facts: Facts) -> Fit:
    """The best settings that the numbers allow; fields are None where they do not."""
    utilisation = safe_utilisation(facts)
    if utilisation is None and facts.total and facts.utilisation_given and (facts.utilisation or 1) <= 0.85:
        utilisation = 0.9  # nothing is known to hold the rest
    base, inferred = _kv_now(facts)
    if base is not None and utilisation and facts.total and facts.utilisation and facts.ceiling:
        base += round((utilisation - facts.utilisation) * facts.total.nbytes)
    token = facts.kv_token.nbytes if facts.kv_token else None
    if base is None or not token:
        return Fit(_by_message(facts), None, None, utilisation, base)
    profile = facts.known.profile_bytes if facts.known else 0
    now = facts.image_tokens or (
        facts.known.max_image_tokens if facts.known and not facts.explicit_pixels else 0
    )
    for context in _contexts(facts, bool(profile and now) and not facts.explicit_pixels):
        for tokens in [0, *IMAGE_TOKENS] if profile and now else [0]:
            if tokens >= now > 0:
                continue
            kv = base + (profile * (now - tokens) if tokens else 0)
            if kv * SLACK >= context * token:
                limit = tokens * facts.known.pixels_per_token if tokens and facts.known else None
                return Fit(context, tokens or None, limit, utilisation, kv, inferred)
    return Fit(None, None, None, utilisation, base, inferred)


def _contexts(facts: Facts, shared: bool) -> list[int]:
    """Candidates, longest first. A checkpoint's default is no wish where images want the same memory."""
    asked = facts.context
    if shared and not (facts.command and facts.command.has("--max-model-len")):
        asked = None
    if asked is None:
        return [*CONTEXTS, 1024]
    return [asked, *(context for context in LONGER + CONTEXTS + (1024,) if context < asked)]


def _kv_now(facts: Facts) -> tuple[int | None, bool]:
    """KV cache of the run, measured; or from the parts, inferred, where it failed before it knew."""
    if facts.kv:
        return facts.kv.nbytes, False
    weights = facts.weights.nbytes if facts.weights else None
    stored = facts.known.weights_bytes.get(stored_format(facts.model) or "") if facts.known else None
    if weights is None and stored:
        weights = stored + ENGINE_BYTES
    if facts.ceiling and weights and facts.known:
        profile = (facts.image_tokens or facts.known.max_image_tokens) * facts.known.profile_bytes
        return facts.ceiling.nbytes - weights - CONTEXT_BYTES - profile, True
    return None, False


def _by_message(facts: Facts) -> int | None:
    """vLLM's own estimate of the longest context, or its count of KV tokens, a little rounded down."""
    for key, group in (("kv_short", 3), ("kv_short_tokens", 1)):
        if (hit := facts.run.last(key)) and hit.groups[group].isdigit() and len(hit.groups[group]) < 12:
            tokens = int(int(hit.groups[group]) * 0.97) // 256 * 256
            return tokens or None
    return None


def image_limit(facts: Facts) -> int | None:
    """Pixels that an encoder cache of the size in the log can hold, for a request that was too large."""
    hit = facts.run.last("encoder_small")
    per_token = facts.known.pixels_per_token if facts.known else 0
    return int(hit.groups[2]) * per_token if hit and per_token else pixels(facts.command)


def describe(nbytes: int) -> str:
    """GiB with two decimals, for reasons."""
    return f"{nbytes / GIB:.2f} GiB"
