"""The nouns: graph, machine, plan, prediction, request, record. No verb lives here."""
