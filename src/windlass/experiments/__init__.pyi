from .recipes.recipe import (
    RECIPE_SEEDS, Recipe, RecipeResult, known_recipes, plan_recipe, run_recipe,
)  # fmt: skip
from .recipes.recipe_plan import RecipePlan
from .recipes.run_training_recipe import PartResult, TrainingResult, plan_training, run_training
from .recipes.training_recipe import (
    TrainingPlan, TrainingRecipe, is_training_recipe, training_plan, training_recipes,
)  # fmt: skip
from .sweeping.sweep import Sweep, load_sweep, make_sweep_request, sweep
from .sweeping.sweep_view import draw_sweep, sweep_rows

__all__ = [
    "RECIPE_SEEDS", "PartResult", "Recipe", "RecipePlan", "RecipeResult", "Sweep", "TrainingPlan",
    "TrainingRecipe", "TrainingResult", "draw_sweep", "is_training_recipe", "known_recipes",
    "load_sweep", "make_sweep_request", "plan_recipe", "plan_training", "run_recipe",
    "run_training", "sweep", "sweep_rows", "training_plan", "training_recipes",
]  # fmt: skip
