"""How the ranks of an attempt agree without collectives: leases, boards, and what carries them."""
