"""Every codec of the library and of `bagua.contrib` keeps to the contract, whole rows and blocks."""

from __future__ import annotations

import pytest

from bagua.codecs import Codec
from bagua.testing import CODEC_CHECKS, check_codec
from tests.contract.members import codec_classes
from tests.contract.variants import variants

CODECS = [codec for cls in codec_classes().values() for codec in variants(cls)]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_contract(codec: Codec) -> None:
    # How the options are refused and that it trains does not depend on them.
    check_codec(codec, skip=() if codec == type(codec)() else ("options", "trains"))


def test_one_check_by_name() -> None:
    check_codec("identity", only=["wire_bytes"])
    with pytest.raises(ValueError, match=r"only: .*value.*wire_bytes.*'wire_byte'"):
        check_codec("identity", only=["wire_byte"])
    with pytest.raises(ValueError, match="skip: expected names"):
        check_codec("identity", skip="value")
    assert "trains" in CODEC_CHECKS
