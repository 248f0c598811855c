"""Plans to the engines of others, their configurations and their logs back."""
