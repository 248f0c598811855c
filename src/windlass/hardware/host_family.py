"""Family: hosts of one kind in any number, of which some numbers have names of their own."""

from pydantic import Field

from windlass.document import Document
from windlass.schema.machine import Link, Machine, Tier
from windlass.schema.provenance import Source


class HostFamily(Document):
    """Equal hosts of equal devices: `NAME:N` is N of them."""

    name: str
    device: str
    """The machine of one device that tells what each of its devices is."""
    devices_per_host: int = Field(ge=1)
    max_hosts: int = Field(ge=1)
    named_sizes: dict[str, int] = Field(default_factory=dict)
    """Hosts of what is sold under a name of its own."""
    tiers: tuple[Tier, ...] = ()
    """What a device of these hosts has beyond its near tier, where that is not what the device's
    own file says."""
    links: tuple[Link, ...]
    """Innermost first, of the most hosts."""
    stragglers: float | None = None
    """As `Machine.stragglers`; None where no runs on such hosts were published."""
    source: str
    date: str
    sources: dict[str, Source]

    def machine(self, hosts: int, device: Machine, name: str) -> Machine:
        """The machine of so many hosts.

        A link joins no more devices than there are, and one that joins no more than those within
        it is left out.

        Args:
            hosts: 1 to `most_hosts`.
            device: the machine of one device that `device` names.
            name: of the machine.
        """
        count = hosts * self.devices_per_host
        links: list[Link] = []
        for link in self.links:
            joins = min(link.joins, count)
            if joins > (links[-1].joins if links else 1):
                links.append(link.model_copy(update={"joins": joins}))
        near, *far = device.device.tiers
        named = {tier.name for tier in self.tiers}
        kept = tuple(tier for tier in far if tier.name not in named)
        return device.model_copy(
            update={
                "name": name,
                "hosts": hosts,
                "devices_per_host": self.devices_per_host,
                "device": device.device.model_copy(update={"tiers": (near, *self.tiers, *kept)}),
                "links": tuple(links),
                "stragglers": self.stragglers,
                "source": self.source,
                "date": self.date,
                "sources": {**device.sources, **self.sources},
            }
        )
