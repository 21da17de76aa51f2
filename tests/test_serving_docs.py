"""The code of those pages of the documentation that compile a serving loop."""

import pytest
from doc_pages import LARGE, ROOT, name_of, run_code


@pytest.mark.parametrize("page", [ROOT / name for name in LARGE], ids=name_of)
def test_code_of_a_page_runs(page):
    run_code(page)
