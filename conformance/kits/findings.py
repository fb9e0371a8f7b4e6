"""Names of what was found about AITER's Triton kernels. Each is a check of the kit where those kernels run: it passes
where the behaviour is seen again, and then the certificate lists it, with the command that shows it to a person.

What each says, where in the vendor's source, and the reproducers: `tools/aiter_triton/findings*.py`.
"""

FINDINGS = (
    "dead-slot-nan",
    "chunked-default-scale",
    "append-rotates",
    "window-all-masked-tile",
    "segment-all-masked",
    "soft-cap-overflow",
    "batch-composition",
    "segments-follow-heads",
    "outputs-written-twice",
    "head-dim-in-segments",
    "page-size-power-of-two",
    "empty-row-in-segments",
    "block-table-overread",
)
