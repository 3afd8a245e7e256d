"""The optimizer's step inside backward, with weights at rest on the software accelerator."""

from collections import Counter

from soft_overlap_programs import check_overlap
from soft_programs import order_of


def test_random_programs_with_steps_ahead(request) -> None:
    order = request.config.getoption("--order")
    content: Counter[str] = Counter()
    for seed in range(12):
        content += check_overlap(seed, order_of(order, seed))
    assert min(content[what] for what in ("ahead", "again", "clipped")) > 5
