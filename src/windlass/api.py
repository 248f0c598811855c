"""The verbs: joins the rooms below into what a user calls. No loops, no numbers, only calls."""
