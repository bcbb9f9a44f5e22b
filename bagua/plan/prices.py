"""Prices of hosts and of traffic, as they are written on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Prices", "parse_prices"]

_PRICE = re.compile(r"^(\d+(?:\.\d+)?)\s*([a-z]{3})\s*/\s*([a-z]+)$", re.IGNORECASE)
_TIMES = {"s": 1.0, "min": 60.0, "h": 3600.0, "hour": 3600.0, "day": 86400.0}
_SIZES = {"mb": 1e6, "gb": 1e9, "gib": 2.0**30, "tb": 1e12}


@dataclass(frozen=True)
class Prices:
    """What hosts and bytes cost.

    Attributes:
        currency: as it was written; None if no price was given.
        host_s: of a host for a second.
        sent_byte: of a byte that leaves a host.
    """

    currency: str | None = None
    host_s: float = 0.0
    sent_byte: float = 0.0

    def of_steps(self, steps: int, step_s: float, bytes_per_host: float, hosts: int) -> float:
        """Price of `steps` on all hosts."""
        return steps * hosts * (step_s * self.host_s + bytes_per_host * self.sent_byte)


def parse_prices(host: str | None, traffic: str | None) -> Prices:
    """Read `2.50usd/h` for a host, and `0.02usd/GB` for what it sends.

    Raises:
        ValueError: a price has no unit, or the two have different currencies; names the option.

    Examples:
        >>> from bagua.plan.prices import parse_prices
        >>> parse_prices("3.60usd/h", None).of_steps(1000, step_s=1.0, bytes_per_host=0.0, hosts=2)
        2.0
    """
    found: list[tuple[str, float]] = []
    for option, text, units in (("--host-price", host, _TIMES), ("--traffic-price", traffic, _SIZES)):
        if text is None:
            continue
        match = _PRICE.match(text)
        if match is None or match[3].lower() not in units:
            example = "2.50usd/h" if units is _TIMES else "0.02usd/GB"
            raise ValueError(f"{option}: expected a price with its unit, as {example}, got {text!r}")
        found.append((match[2].lower(), float(match[1]) / units[match[3].lower()]))
    currencies = {currency for currency, _ in found}
    if len(currencies) > 1:
        raise ValueError(f"--host-price and --traffic-price: two currencies, {' and '.join(sorted(currencies))}")
    values = [value for _, value in found]
    return Prices(
        found[0][0] if found else None,
        values[0] if host is not None else 0.0,
        values[-1] if traffic is not None else 0.0,
    )
