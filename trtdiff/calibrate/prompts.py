"""What the pictures of a range scan show: few prompts, as different as prompts are.

One is short and plain; one has the words that people write to get quality, and fills its row of tokens.
"""

_SHORT = "a photograph of a lighthouse in a storm"
_LONG = (
    "portrait of an old fisherman in a yellow raincoat, highly detailed, intricate, sharp focus, dramatic lighting, "
    "8k, masterpiece, ((best quality)), ultra realistic, 50mm, depth of field, trending on artstation, vivid colours, "
    "cinematic, soft shadows, film grain, award winning photography, studio quality, award winning"
)
PROMPTS: dict[str, tuple[str, ...]] = {"stable-diffusion": (_SHORT, _LONG)}
"""Family → prompts of a scan."""
NEGATIVE = "blurry, low quality, deformed, text, watermark"


def prompts_for(family: str) -> tuple[str, ...]:
    """Give the prompts that a family's checkpoints are scanned with: its own, or the usual two."""
    return PROMPTS.get(family, (_SHORT, _LONG))
