"""Layouts of stages in Megatron's letters."""

# Megatron-Bridge's recipes have these, and Megatron-core 0.16.1 makes of each so many t a stage.
RECIPES = {
    "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL": [*[2] * 35, 3, 2, 2, 2, 1],
    "Et*4|(t*4|)*14tmL": [*[4] * 15, 1],
    "Et*4|(t*7|)*5t*8|tmL": [4, 7, 7, 7, 7, 7, 8, 1],
    "Et*4|(tttt|)*14tmL": [*[4] * 15, 1],
    "Etttttt|tttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttt|tttt|tttt|tttt|ttttmL": [
        *[6, 4],
        *[8] * 6,
        *[4] * 5,
    ],
    "Etttttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|ttttmL": [
        6,
        *[4] * 18,
    ],
    "Et|(tt|)*30L": [1, *[2] * 30, 0],
    "Et|(tt|)*30mL": [1, *[2] * 30, 0],
    "Et|t||tttt|tttt|tttt|tttt||tttt|tttt|tttt|tttt||tttt|tttt|tttt|tttt||tttt|tttt|tttt|tttt||tttt|tttt|ttttmL": [
        *[1, 1],
        *[0, 4, 4, 4, 4] * 4,
        *[0, 4, 4, 4],
    ],
    "mL": [0],
    "Et|*2tL": [1, 0, 1],
}
